# C++ programs with LibTorch: the library that CMake builds and the one in the wheel, each with the
# programs of tests/cpp and examples/cpp. Sourced by .ci/run.

check_cpp() {
  command -v cmake >/dev/null || fail "cmake is not on the PATH: C++ programs cannot be checked"
  hide_nvcc
  section "C++: Python's package"
  make_wheel
  new_environment cpp "$CPU_PYTHON" "$CPU_TORCH"
  pip install "$work"/wheel/fastnorm-*.whl
  local torch_cmake
  torch_cmake=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')

  section "C++: the library by CMake"
  cmake -B "$work/library" -DCMAKE_PREFIX_PATH="$torch_cmake" -DCMAKE_INSTALL_PREFIX="$work/prefix"
  cmake --build "$work/library" --parallel "$(nproc)"
  cmake --install "$work/library"
  rm -rf "$work/library" # the installed one must do without
  section "C++: programs with the library by CMake"
  check_programs "$torch_cmake" "$work/prefix"

  section "C++: programs with the library of the Python package"
  check_programs "$torch_cmake" \
    "$(cd "$work" && python -c 'import fastnorm; print(fastnorm.cmake_prefix_path)')"
  drop_environment cpp
}

# Builds and runs tests/cpp against the torch in $1 and the fastnorm in $2.
check_programs() {
  rm -rf "$work/programs"
  cmake -B "$work/programs" -S tests/cpp -DCMAKE_PREFIX_PATH="$1;$2" \
    -DPython3_EXECUTABLE="$(command -v python)"
  cmake --build "$work/programs" --parallel "$(nproc)"
  ctest --test-dir "$work/programs" --output-on-failure
}
