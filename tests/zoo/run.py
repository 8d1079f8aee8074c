"""The zoo: shapes of models, optimizers, data and scripts, each run alone, with three workers, and with faults.

    python tests/zoo/run.py                        all of them, some 15 minutes on two quiet cores; `make zoo`
    python tests/zoo/run.py adam lstm              these
    python tests/zoo/run.py --script lstm          print its script, to run it by hand
    python tests/zoo/run.py --json results.json --write-docs

Exit code 1 unless every shape turned out as the catalogue says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from catalogue import SHAPES
from page import PAGE, write_page
from shape import Shape
from trying import ALONE, Result, judge


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="shapes (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="shapes at a time (default: 1)")
    parser.add_argument("--quick", action="store_true", help="without those that take gigabytes or minutes")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--script", action="store_true", help="print the scripts in place of running them")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write results there; those of other shapes in it stay"
    )
    parser.add_argument("--write-docs", action="store_true", help=f"write {PAGE.name} from the results in --json")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.names) - set(SHAPES)):
        parser.error(f"there is no shape {', '.join(unknown)}; --list has the names")
    if args.write_docs and not args.json:
        parser.error("--write-docs reads the results of all shapes from --json FILE")
    shapes = [SHAPES[name] for name in args.names or SHAPES]
    if args.quick:
        shapes = [shape for shape in shapes if not shape.nightly]
    if args.list or args.script:
        for shape in shapes:
            print(shape.script() if args.script else f"{shape.name:26} {shape.what}")
        return 0
    with ThreadPoolExecutor(args.jobs) as pool:
        results = []
        for result in pool.map(tried, shapes):
            results.append(told(result))
            if args.json:
                keep(result, args.json)
    ALONE.close()
    if args.write_docs:
        write_page(json.loads(args.json.read_text()))
    wrong = [result.shape.name for result in results if not result.expected]
    print(f"{len(results)} shapes, {len(wrong)} not as expected{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


def tried(shape: Shape) -> Result:
    with tempfile.TemporaryDirectory(prefix="zoo-", ignore_cleanup_errors=True) as home:
        return judge(shape, Path(home))


def told(result: Result) -> Result:
    """A line of the table; of a shape that is not as expected all that is known."""
    mark = "" if result.expected else f"  NOT AS EXPECTED ({result.shape.expected})"
    print(f"{result.shape.name:26} {result.kind:10} {result.seconds:6.1f} s{mark}", flush=True)
    if not result.expected:
        print(f"  digests: {result.digests}\n{result.said}", flush=True)
    return result


def keep(result: Result, path: Path) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    known[result.shape.name] = {
        "result": result.kind,
        "expected": result.expected,
        "digests": result.digests,
        "said": result.said,
        "seconds": round(result.seconds, 1),
    }
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
