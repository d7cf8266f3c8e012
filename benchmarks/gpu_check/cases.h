#pragma once

#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {
/* cffi: begin */

// Every kernel on random input, `rounds` times; collectives of up to `most_ranks`. Returns how many cases were wrong.
int gpu_check_cases(int rounds, uint32_t most_ranks);

// Two processes: each maps the other's memory, and they all-reduce. Returns how many rounds were wrong. Call it before
// anything else asks for the GPU: it forks.
int gpu_check_two_processes(int rounds);

// Times pack, reduce and quantise beside a copy of as many bytes. Returns how many are below `goal` of its speed.
int gpu_check_speed(double goal);
/* cffi: end */
}
#pragma GCC visibility pop
