"""`python -m ampd.cli` is `ampdctl`."""

from ampd.cli.main import main

if __name__ == "__main__":
    main()
