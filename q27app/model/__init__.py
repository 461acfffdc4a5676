"""ROOM 2. The network, written once, in backend operations. Start at layers.py. Imports: kernels' interface, weights."""
