"""``python -m regard``, and with it ``torchrun -m regard``."""

from regard.cli import main

if __name__ == "__main__":
    main()
