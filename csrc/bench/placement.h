// Which processor a process runs on. Round trips of a few microseconds depend on it more than on anything else.
#pragma once

namespace mr::bench {

constexpr int kAnyCpu = -1;

bool may_run_on(int cpu);
// Keeps this process and the threads it will start on one processor; kAnyCpu changes nothing. Throws Failure.
void pin_to(int cpu);

}  // namespace mr::bench
