// gpu_check cases ROUNDS RANKS | processes ROUNDS | speed GOAL       (benchmarks/gpu_check.sh runs them all)
#include <string.h>

#include "cases.h"
#include "memory.h"

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "";
  if (argc == 4 && strcmp(what, "cases") == 0) {
    return gpu_check_cases(atoi(argv[2]), uint32_t(atoi(argv[3]))) ? 1 : 0;
  }
  if (argc == 3 && strcmp(what, "processes") == 0) return gpu_check_two_processes(atoi(argv[2])) ? 1 : 0;
  if (argc == 3 && strcmp(what, "speed") == 0) return gpu_check_speed(atof(argv[2])) ? 1 : 0;
  fprintf(stderr, "usage: gpu_check cases ROUNDS RANKS | processes ROUNDS | speed GOAL\n");
  return 2;
}
