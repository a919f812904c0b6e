# Ways to install fastnorm, each from a clean environment; the others are tried with the test suites
# in .ci/run: pip install with torch and without, editable, a wheel. Sourced by .ci/run.

make_sdist() {
  rm -rf "$work/sdist"
  python -m build --sdist --outdir "$work/sdist" .
}

# Makes the source distribution unless it is there, and prints where its content lies.
unpacked_sdist() {
  if [ ! -d "$work/sdist" ]; then (check_sdist >&2); fi
  local tree=$work/sdist_tree
  mkdir -p "$tree"
  tar -xzf "$work"/sdist/fastnorm-*.tar.gz -C "$tree" --strip-components=1
  echo "$tree"
}

# What tells one installed torch from another: its version, and when and where it was written.
torch_files() {
  python -c 'import torch; print(torch.__version__)'
  stat --format '%n %i %Y' "$(python -c 'import torch; print(torch.__file__)')"
}

check_cuda_torch_without_nvcc() (
  hide_nvcc
  fails_with "no working nvcc was found|Install CUDA toolkit|CUDA_HOME" \
    env FASTNORM_CUDA=1 pip install --no-deps .
)

# Activates the environment that compiles for CPU_TORCH; makes it unless it is there.
enter_builder() {
  if [ -d "$work/environments/builder" ]; then
    # shellcheck disable=SC1091
    source "$work/environments/builder/bin/activate"
  else
    new_environment builder "$CPU_PYTHON" "$CPU_TORCH" setuptools ninja
  fi
}

# Makes the wheel of the source distribution for CPU_TORCH unless it is there.
make_wheel() {
  if [ -d "$work/wheel" ]; then return; fi
  local tree
  tree=$(unpacked_sdist)
  section "pip wheel: Python $CPU_PYTHON, $CPU_TORCH, no nvcc"
  enter_builder
  pip wheel --no-build-isolation --no-deps --wheel-dir "$work/wheel" "$tree"
  deactivate
}

# As the README says, in a project of uv's and in an environment. uv does not read pip's settings.
check_uv() {
  hide_nvcc
  local tree
  tree=$(unpacked_sdist)
  # In the repository the other lane builds, and where the wheel was made what it left is used below.
  cp -r "$tree" "$work/project_tree"
  make_wheel
  section "uv: a project"
  new_environment uv "$CPU_PYTHON" uv
  use_pips_indexes_in_uv
  export UV_CACHE_DIR=$work/uv_cache
  mkdir -p "$work/project"
  cat >"$work/project/pyproject.toml" <<TOML
[project]
name = "user"
version = "1"
requires-python = "==$CPU_PYTHON.*"
dependencies = ["fastnorm", "$CPU_TORCH"]

[tool.uv.sources]
fastnorm = { path = "$work/project_tree" }

$(sed -n '/^\[tool.uv/,/^```/p' README.md | sed '/^```/d')
TOML
  (cd "$work/project" && uv sync --python "$(find_python "$CPU_PYTHON")" &&
    uv run --no-sync python -c "
import fastnorm, torch
assert fastnorm._C.build_info()['torch'] == torch.__version__.split('+')[0] == '${CPU_TORCH##*=}'")
  section "uv: an environment"
  # Where the wheel was made: what ninja finds unchanged is not compiled again.
  (
    cd "$tree"
    enter_builder
    export PATH="$PATH:$work/environments/uv/bin"
    uv pip install setuptools ninja && uv pip install --no-build-isolation .
    check_build "info['torch'] == '${CPU_TORCH##*=}'"
  )
  drop_environment uv
}

use_pips_indexes_in_uv() {
  local setting
  for setting in index-url:UV_DEFAULT_INDEX extra-index-url:UV_INDEX find-links:UV_FIND_LINKS \
    cert:SSL_CERT_FILE; do
    local value
    value=$(pip config get "global.${setting%%:*}" 2>/dev/null || true)
    if [ -n "$value" ]; then export "${setting##*:}=$value"; fi
  done
}
