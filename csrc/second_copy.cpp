// Stops the loading of a second copy of this library into one process. Programs and modules that
// are linked to libfastnorm share the first that was loaded, whichever file it came from, as the
// loader goes by its name (SONAME); one that is loaded by its path, with dlopen, is a second.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include "fastnorm/version.h"

namespace {

struct OnlyCopy {
  OnlyCopy() {
    if (!c10::Dispatcher::singleton().findSchema({"fastnorm::layer_norm", ""})) return;
    Dl_info here{};
    dladdr(reinterpret_cast<const void*>(&fastnorm_version), &here);
    TORCH_CHECK(
        false, "this process already has fastnorm's operators, from another copy of ",
        here.dli_fname ? here.dli_fname : "libfastnorm",
        ". Link all C++ code to the library of Python's package: "
        "python -c 'import fastnorm; print(fastnorm.cmake_prefix_path)' says what to add to "
        "CMAKE_PREFIX_PATH. Where the operators are there already, load nothing.");
  }
};

// Before the static objects of the other files, which register operators.
__attribute__((init_priority(101))) OnlyCopy only_copy;

}  // namespace
