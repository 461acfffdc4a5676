"""`python -m q27app`."""

from q27app.cli import main

if __name__ == "__main__":
    main()
