#!/usr/bin/env bash
# gpu_check.sh [FOLDER [STEP ...]]: the whole check on a machine with a GPU, from a bare checkout,
# in under 4 minutes: machine, build, tests, bench, real, timed. No network, no root, no .venv.
#
# Needs a C compiler and a python3 (PYTHON=... chooses) that has cython, setuptools, numpy, pytest,
# pytest-benchmark and hypothesis; takes matplotlib, CuPy, PyTorch, cuda-bindings and a libcudart if
# they are there. Everything lands in FOLDER (gpu-check): STEP.log, and
#
#   machine.txt    card, driver, link, CPU, packages      copy.md, .svg, .json   the benchmark
#   summary.txt    steps, seconds, what must be reached   real.json, timed.json  the demo
#
# A step that fails or runs out of its time stops none of the others; then the exit code is 1.
# With KVIO_CUDA_LIBRARY naming the tests' fake driver it is a rehearsal: small, no speed.
set -euo pipefail
self=$(realpath "$0")
PYTHON=$(realpath -s "$(command -v "${PYTHON:-python3}")")
python=$PYTHON
if [ "${1-}" != --step ]; then
	out=$(realpath -m "${1:-gpu-check}")
fi
cd "$(dirname "$self")/.."
export PYTHON PYTHONPATH=$PWD OPENBLAS_NUM_THREADS=1 KVIO_REQUIRE=
export XLA_PYTHON_CLIENT_PREALLOCATE=false	# or JAX takes most of the card

# ---- the steps; each runs in a process of its own, in the checkout

# What is not there is not told; that is no failure.
machine() {
	set +e
	local card=name,driver_version,clocks.sm,clocks.max.sm,power.limit
	card+=,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max
	date -u
	git rev-parse HEAD 2>/dev/null
	uname -srm
	grep -m1 'model name' /proc/cpuinfo
	echo "$(nproc) CPUs, load $(cut -d' ' -f1-3 /proc/loadavg)"
	grep -E 'MemTotal|MemAvailable' /proc/meminfo
	timeout 8 nvidia-smi
	timeout 8 nvidia-smi --format=csv --query-gpu=$card
	nvcc --version 2>/dev/null | tail -n 2
	"$python" - <<-'END'
	import importlib.metadata as packages, sys
	print(sys.executable, sys.version.split()[0])
	for name in ("numpy", "cython", "setuptools", "pytest", "pytest-benchmark", "hypothesis",
	             "matplotlib", "torch", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings",
	             "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
	    try:
	        print(f"{name} {packages.version(name)}")
	    except packages.PackageNotFoundError:
	        print(f"{name}: not there")
	END
	return 0
}

# The extension modules are there for this Python, and no source is newer.
is_built() {
	local suffix name newer
	suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
	for name in block index nic ring; do
		[ -e "kvio/_ext/$name$suffix" ] || return 1
		newer=$(find kvio/_ext include setup.py \( -name '*.[ch]' -o -name '*.px?' -o \
			-name '*.pyx' -o -name setup.py \) -newer "kvio/_ext/$name$suffix")
		[ -z "$newer" ] || return 1
	done
}

# Without pyproject.toml, whose licence setuptools before 77 refuses, and which says nothing of
# extension modules; and another compiler's new warning is no reason to measure nothing.
build_ext() {
	KVIO_CFLAGS="${KVIO_CFLAGS-} -Wno-error" "$python" - -q build_ext --inplace \
		--parallel "$(nproc)" <<-'END'
	import runpy
	from setuptools.dist import Distribution
	Distribution.parse_config_files = lambda self, *args, **options: None
	runpy.run_path("setup.py", run_name="__main__")
	END
}

build() {
	if is_built; then
		echo "kvio/_ext/*.so are newer than their sources"
	else
		build_ext
	fi
	"$python" -m kvio doctor
}

tests() {
	[ "$fake" = 1 ] || export KVIO_REQUIRE=cuda
	"$python" -m pytest -p no:cacheprovider -p no:benchmark -k 'cuda or gpu or flows and device' \
		tests/transfer/test_c{ontract,uda_real,uda_copies}*.py tests/engine/test_flows.py
}

# The tables are written when the session ends: it has to stop by itself before its time is over.
bench() {
	local options=(--benchmark-only --benchmark-json "$out/copy.json" --copy-seconds 50 -k gpu)
	if [ "$fake" = 1 ]; then
		options=(--benchmark-disable -k 'gpu and (must or sms or 4K)')
	else
		export KVIO_REQUIRE=cuda	# a skip for want of a GPU is a failure here
	fi
	"$python" -m pytest -p no:cacheprovider benchmarks/bench_copy.py "${options[@]}" \
		--copy-table "$out/copy.md"
	[ -s "$out/copy.md" ]			# whatever was skipped
}

demo() { "$python" -m kvio demo --json --quiet --device cuda:0 "$@"; }

if [ "${1-}" = --step ]; then
	out=$3 fake=$4
	case $2 in
	machine) machine ;;
	build) build ;;
	tests) tests ;;
	bench) bench ;;
	real) demo --only real --model seeded:4 >"$out/real.json" ;;
	timed) demo --only timed --nodes 1P1D --turns 1 >"$out/timed.json" ;;
	esac
	exit
fi

# ---- all of them, each with its time

most=235			# seconds for everything
all='machine build tests bench real timed'
begin=$EPOCHREALTIME
steps=("${@:2}")
for name in "${steps[@]}"; do
	if [[ " $all " != *" $name "* ]]; then
		echo "there is no step $name; there are $all" >&2
		exit 2
	fi
done
failed=0
mkdir -p "$out"
rm -f "$out"/{machine,summary}.txt "$out"/{copy,real,timed}.{md,svg,json}	# an earlier run's
rm -f "$out"/{build,tests,bench,real,timed}.log

# Only the tests' fake driver has this function.
fake=$("$python" -c 'import ctypes, os
path = os.environ.get("KVIO_CUDA_LIBRARY", "")
print(int(os.path.exists(path) and hasattr(ctypes.CDLL(path), "fake_cuda_reset")))')

say() { tee -a "$out/summary.txt"; }
since() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }'; }

# step NAME SECONDS LOG
step() {
	local name=$1 limit=$2 log=$out/$3 rc=0 began=$EPOCHREALTIME left note=
	[ ${#steps[@]} = 0 ] || [[ " ${steps[*]} " == *" $name "* ]] || return 0
	left=$(awk -v most="$most" -v gone="$(since "$begin")" 'BEGIN { print int(most - gone) }')
	[ "$limit" -le "$left" ] || limit=$left
	if [ "$limit" -gt 0 ]; then
		timeout --kill-after=3 "$limit" "$self" --step "$name" "$out" "$fake" \
			>"$log" 2>&1 </dev/null || rc=$?
	else
		rc=124
	fi
	[ $rc != 124 ] || note="  its time was over: $limit s"
	printf '%-8s rc %-3d %6s s%s\n' "$name" "$rc" "$(since "$began")" "$note" | say
	if [ $rc != 0 ]; then
		failed=1
		tail -n 15 "$log" | sed 's/^/    /' || true
	fi
}

step machine 20 machine.txt
step build 90 build.log
step tests 75 tests.log
step bench 80 bench.log
step real 20 real.log
step timed 30 timed.log

verdict='every step passed'
[ $failed = 0 ] || verdict='A STEP HAS FAILED'
[ "$fake" = 0 ] || verdict+='; a fake driver: no figure here says anything of speed'
printf 'all      %13s s  %s\n' "$(since "$begin")" "$verdict" | say
if [ -e "$out/copy.md" ]; then
	sed -n '/^What must be reached/,$p' "$out/copy.md" | say
fi
exit $failed
