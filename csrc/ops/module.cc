// The module monarch_rdma._C: importing it registers torch.ops.monarch_rdma, and it has nothing else in it. One file of
// this folder for each subject. Only these files see torch, through its stable ABI (one binary for torch >= 2.10).
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <string>

#include "../engine.h"

static std::string engine_version() { return mr_version(); }

STABLE_TORCH_LIBRARY(monarch_rdma, m) { m.def("engine_version() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(monarch_rdma, CompositeExplicitAutograd, m) {
  m.impl("engine_version", TORCH_BOX(&engine_version));
}

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
