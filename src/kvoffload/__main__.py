# SPDX-License-Identifier: Apache-2.0
from kvoffload.cli import main

if __name__ == "__main__":
    main()
