// The version of fastnorm, here alone: setup.py reads it from this line.
#pragma once

#define FASTNORM_VERSION "0.1.0"
