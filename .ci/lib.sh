# What the checks in .ci/ share: environments, what they hold, and what must not be in them.
# Sourced by .ci/run.

# Says what is done now, in the check's output and at once on descriptor 3. Kept in a file as well,
# for checks run in subshells.
section() {
  printf '\n==== [%5d s] %s ====\n' "$SECONDS" "$*"
  printf '[%5d s] %s: %s\n' "$SECONDS" "$check" "$*" >&3
  printf '%d\t%s\t%s\n' "$SECONDS" "$check" "$*" >>"$work/sections"
}

# Says that a check has ended.
end_section() {
  printf '%d\t%s\t\n' "$SECONDS" "$check" >>"$work/sections"
}

# Prints what each section took, and then each check. What did not end is where a check failed.
print_seconds() {
  awk -F '\t' '
    section[$2] != "" {
      printf "%6d s  %-14s %s\n", $1 - start[$2], $2, section[$2]
      if (!($2 in seconds)) order[++checks] = $2
      seconds[$2] += $1 - start[$2]
    }
    { start[$2] = $1; section[$2] = $3 }
    END {
      for (check in section) {
        if (section[check] != "") printf "failed:   %-14s %s\n", check, section[check]
      }
      print ""
      for (i = 1; i <= checks; ++i) printf "%6d s  %s\n", seconds[order[i]], order[i]
    }' "$work/sections"
}

fail() {
  echo "$*" >&2
  exit 1
}

# Prints the path of a Python of release $1 that can make virtual environments and has its headers.
find_python() {
  local release=$1 candidates=("python$1") candidate
  if command -v pyenv >/dev/null; then
    local installed
    installed=$(pyenv versions --bare 2>/dev/null | grep "^${release//./\\.}\.[0-9]*$" | sort -V | tail -1) || true
    if [ -n "$installed" ]; then candidates+=("$(pyenv prefix "$installed")/bin/python"); fi
  fi
  if command -v uv >/dev/null; then candidates+=("$(uv python find "$release" 2>/dev/null || true)"); fi
  for candidate in "${candidates[@]}"; do
    if [ -n "$candidate" ] && "$candidate" - "$release" >/dev/null 2>&1 <<'PYTHON'; then
import ensurepip, os, sys, sysconfig
assert ".".join(map(str, sys.version_info[:2])) == sys.argv[1]
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
PYTHON
      echo "$candidate"
      return
    fi
  done
  fail "Python $release with venv and its C headers was not found (looked for python$release, in pyenv and in uv)"
}

# Makes and activates the virtual environment named $1, of Python release $2, with the packages $3...
new_environment() {
  local python name=$1 release=$2
  shift 2
  python=$(find_python "$release")
  rm -rf "${work:?}/environments/$name"
  "$python" -m venv "$work/environments/$name"
  # shellcheck disable=SC1090,SC1091
  source "$work/environments/$name/bin/activate"
  if [ $# -gt 0 ]; then pip install --quiet "$@"; fi
}

# Deactivates the environment $1 and gives its disk space back: PyTorch takes gigabytes.
drop_environment() {
  deactivate
  rm -rf "${work:?}/environments/$1"
}

# Checks what the installed fastnorm was built for: $1 is a Python expression over `info`. Also that
# it can be imported from elsewhere and computes.
check_build() {
  (cd "$work" && python - "$1" <<'PYTHON')
import sys
import fastnorm, torch
info = fastnorm._C.build_info()
print(info)
assert eval(sys.argv[1]), f"{sys.argv[1]} does not hold"
assert info["version"] == fastnorm.__version__
y = fastnorm.LayerNorm(5)(torch.randn(3, 5))
assert y.mean().abs() < 1e-6
PYTHON
}

# The PATH without the directories' entries that are named $@: each directory that holds one gives
# way to a copy without them.
path_without() {
  local directory name copy visible=
  while read -r -d : directory; do
    for name; do
      if [ -e "$directory/$name" ]; then
        copy=$(mktemp -d "$work/path.XXXXXX")
        find "$directory" -mindepth 1 -maxdepth 1 -exec ln -s -t "$copy" {} +
        (cd "$copy" && rm -f "$@")
        directory=$copy
        break
      fi
    done
    visible+=$directory:
  done <<<"$PATH:"
  echo "${visible%:}"
}

# Makes nvcc unfindable, on the PATH and in /usr/local/cuda.
hide_nvcc() {
  PATH=$(path_without nvcc)
  export PATH CUDA_HOME=$work/no_toolkit
  unset CUDA_PATH
  if command -v nvcc; then fail "nvcc is still found"; fi
}

# Runs a command that must fail and say each of the words in $1, separated by "|".
fails_with() {
  local words=$1 word output
  shift
  if output=$("$@" 2>&1); then fail "$* should have failed"; fi
  echo "$output" | grep -A 4 "fastnorm: " || true
  while read -r -d '|' word; do
    grep -qF -- "$word" <<<"$output" || fail "$* did not say '$word': $output"
  done <<<"$words|"
}
