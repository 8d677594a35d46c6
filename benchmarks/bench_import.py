"""What `import kvio` costs a program that uses numpy anyway. `import numpy` is the floor."""
import subprocess
import sys


def fresh(code):
    def run():
        subprocess.run([sys.executable, "-c", code], check=True)
    return run


def test_import(paired):
    paired(fresh("import kvio"), fresh("import numpy"), rounds=10,
           names=("import kvio", "import numpy"))
