import sys

from .run import run

sys.exit(run(sys.argv[1:]))
