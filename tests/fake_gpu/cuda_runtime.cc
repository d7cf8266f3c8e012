// libcudart.so.13; with BROKEN, one that lacks a function which is needed.
#define PREFIX cuda
#ifdef BROKEN
#define cudaIpcOpenMemHandle cudaIpcOpenMemHandle_gone
#endif
#include "spelled.h"

FACE(RuntimeGetVersion, int* version) { return *version = 13000, 0; }
