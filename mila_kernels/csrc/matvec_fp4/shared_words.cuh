#pragma once

#include "../ptx.cuh"

DEVICE void keep_in_register(uint32_t& x) { keep_here(x); }
