#include "placement.h"

#include <sched.h>

#include <string>

#include "failure.h"

namespace mr::bench {

bool may_run_on(int cpu) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  return cpu >= 0 && cpu < CPU_SETSIZE && sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
         CPU_ISSET(cpu, &allowed);
}

void pin_to(int cpu) {
  if (cpu == kAnyCpu) return;
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  if (sched_setaffinity(0, sizeof only, &only) != 0) throw_errno("pinning to processor " + std::to_string(cpu));
}

}  // namespace mr::bench
