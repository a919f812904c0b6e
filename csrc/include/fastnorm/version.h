// The version of fastnorm, here alone: setup.py and CMakeLists.txt read it from this line.
#pragma once

#include "fastnorm/export.h"

#define FASTNORM_VERSION "0.1.0"

// The version of the library that was loaded; FASTNORM_VERSION is that of the headers.
extern "C" FASTNORM_API const char* fastnorm_version();
