/* Gumbel noise, as sampling.py draws it. */

#pragma once

#include <stdint.h>

/* out [size]: the noise of a place in the text, a function of (seed, place, token) alone. */
void noise_at(uint64_t seed, uint32_t place, float *out, int size);
