# C++ programs with LibTorch: with the library that CMake builds and with the one in the wheel.
# Sourced by .ci/run.

check_cpp() {
  command -v cmake >/dev/null || fail "cmake is not on the PATH: C++ programs cannot be checked"
  hide_nvcc
  make_wheel
  section "C++: Python's package"
  enter_builder
  pip uninstall --yes fastnorm # what check_uv installed
  pip install "$work"/wheel/fastnorm-*.whl
  section "C++: the library by CMake, and programs with that and with the package's"
  tests/cpp/run "$work/cpp"
  drop_environment builder
}
