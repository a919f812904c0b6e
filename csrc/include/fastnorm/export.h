// FASTNORM_API marks what libfastnorm exports; everything else in it is hidden.
#pragma once

#define FASTNORM_API __attribute__((visibility("default")))
