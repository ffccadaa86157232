"""Time and memory of the chunked objective beside the dense one; the same as `clap-zero bench objective`.

python benchmarks/objective.py                          # B = 2048 to 16384, d = 512, and one rank of 16 at 65,536
python benchmarks/objective.py --sizes 512 --rank-of 0  # a look in seconds
"""

from __future__ import annotations

import argparse

from clap_zero.objective.bench import add_bench_arguments, bench_from_args

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_bench_arguments(parser)
    bench_from_args(parser.parse_args())
