"""What was tested: the source's state and the built extensions, in one line."""
import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def build_hash() -> str:
    """`v0.1-3-gabc1234, extensions 0123456789ab`."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT,
                               capture_output=True, text=True)
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kvio" / "_ext").glob("*.so")):
        digest.update(path.name.encode() + path.read_bytes())
    return (f"source {described.stdout.strip() or 'without git'}, "
            f"extensions {digest.hexdigest()[:12]}")
