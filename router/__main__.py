"""`python -m router`."""

from router.cli import main

if __name__ == "__main__":
    main()
