"""Child process that runs METIS: `python _metis_worker.py FOLDER PARTS SEED`.

Reads rowptr.npy and col.npy (symmetric, without loops) from FOLDER, writes assignment.npy there. It imports neither
torch nor this package, so it starts at once, and a crash of METIS ends it alone.
"""

import sys
from pathlib import Path

# A script's own folder comes first on the path: modules there must not shadow others.
if sys.path[:1] == [str(Path(__file__).parent)]:
    sys.path.pop(0)

import numpy as np  # noqa: E402
import pymetis  # noqa: E402


def die_with_parent() -> None:
    """On Linux, end when the parent does: a killed run must not leave a partitioner behind."""
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def main(folder: Path, parts: int, seed: int) -> None:
    rowptr, col = np.load(folder / "rowptr.npy"), np.load(folder / "col.npy")
    dtype = pymetis.zero_copy_dtype()
    if col.size > np.iinfo(dtype).max:
        sys.exit(f"this METIS counts edges with {dtype}; the graph has {col.size}, at most {np.iinfo(dtype).max} fit")
    adjacency = pymetis.CSRAdjacency(rowptr.astype(dtype, copy=False), col.astype(dtype, copy=False))
    result = pymetis.part_graph(parts, adjacency, options=pymetis.Options(seed=seed))
    np.save(folder / "assignment.npy", np.asarray(result.vertex_part, dtype=np.int64))


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
