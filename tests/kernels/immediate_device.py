"""What devices without a card share: nothing runs beside the host, so every event has passed when it is asked about."""

from __future__ import annotations

import numpy as np

from q27app.kernels.graph import Rerun


class ImmediateDevice:
    """See `launch.Device`; a device of this kind adds memory, `upload`, `download`, `module` and `launch`."""

    is_recording = False
    num_launches = 0

    def upload_pinned(self, address: int, data: np.ndarray) -> None:
        self.upload(address, data)

    def download_pinned(self, data: np.ndarray, address: int) -> None:
        data[:] = self.download(address, data.nbytes)

    def download_beside(self, data: np.ndarray, address: int) -> int:
        self.download_pinned(data, address)
        return self.mark()

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def mark(self) -> int:
        return 1

    def wait(self, event: int) -> None: ...

    def forget(self, event: int) -> None: ...

    def is_done(self, event: int) -> bool:
        return True

    def moment(self) -> int:
        return 0

    def has_passed(self, moment: int) -> bool:
        return True

    def synchronize(self) -> None: ...

    def prepare(self, jobs, progress=None) -> None: ...

    def record(self, run) -> Rerun:
        return Rerun(run)
