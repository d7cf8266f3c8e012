// The device layer on a fake runtime, in either spelling. A process has one runtime, so each choice is made in a
// process of its own: this program again, told by its arguments what to load.
#include "memory/device.h"

#include <cstdio>
#include <cstdlib>

#include "check.h"
#include "fake_gpu_side.h"
#include "memory/device_ipc.h"

using namespace mr;
using namespace mr::test;

namespace {

// What `program --describe LIBRARY...` prints; `load`: it may load a runtime by itself.
std::string described(const std::string& libraries, const std::string& environment = "", bool load = false) {
  char self[4096];
  const ssize_t length = ::readlink("/proc/self/exe", self, sizeof self);
  const std::string command = environment + " " + std::string(self, static_cast<size_t>(length)) +
                              (load ? " --load " : " --describe ") + libraries;
  std::string out;
  FILE* const pipe = ::popen(command.c_str(), "r");
  char line[4096];
  while (std::fgets(line, sizeof line, pipe) != nullptr) out += line;
  if (::pclose(pipe) != 0) check_failed(__FILE__, __LINE__, command + " failed: " + out);
  return out;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
#define CHECK_HAS(text, part) \
  if (!has(text, part)) check_failed(__FILE__, __LINE__, std::string("no \"") + (part) + "\" in " + (text))

const FakeGpu& fake() {
  static const char* const other = std::getenv("TEST_DEVICE_RUNTIME");
  static const FakeGpu loaded(other != nullptr ? other : "libamdhip64.so.7");
  return loaded;
}

const Gpu& gpu() {
  (void)fake();
  return Gpu::need("this test");
}

std::string why_not(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.status().text;
  }
  return "";
}

uint64_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace

TEST(no_runtime_is_no_error) { CHECK_HAS(described(""), "no GPU runtime is loaded in this process"); }

TEST(the_loaded_runtime_is_used) {
  const std::string hip = described("libamdhip64.so.7");
  CHECK_HAS(hip, "\"runtime\": \"HIP\"");
  CHECK_HAS(hip, fake_gpu_folder() + "libamdhip64.so.7");
  CHECK_HAS(hip, "\"pci\": \"0000:c0:00.0\"");
  CHECK_HAS(hip, "\"peers\": [1]");
  CHECK_HAS(hip, "\"stream_waits\": true");
  CHECK_HAS(described("libcudart.so.13 libcuda.so.1"), "\"runtime\": \"CUDA\"");
}

TEST(a_runtime_is_loaded_only_where_asked) {
  const std::string path = "LD_LIBRARY_PATH=" + fake_gpu_folder();
  CHECK_HAS(described("", path), "no GPU runtime is loaded");
  CHECK_HAS(described("", path, true), "\"library\": \"libamdhip64.so.7\"");
}

TEST(two_runtimes_of_one_kind_are_refused) {
  const std::string two = described("libamdhip64.so.7 libamdhip64.so.6");
  CHECK_HAS(two, "two HIP runtimes are loaded");
  CHECK_HAS(two, "libamdhip64.so.7");
  CHECK_HAS(two, "libamdhip64.so.6");
  CHECK_HAS(two, "\"devices\": []");
}

TEST(two_brands_need_one_with_devices) {
  CHECK_HAS(described("libamdhip64.so.7 libcuda.so.1 libcudart.so.13"), "both have devices");
  CHECK_HAS(described("libamdhip64.so.7 libcuda.so.1 libcudart.so.13", "FAKE_GPU_FAIL=hipGetDeviceCount=100"),
            "only the first has devices");
}

TEST(a_missing_function_is_named) {
  CHECK_HAS(described("libcuda.so.1 libcudart.so.12"), "it has no cudaIpcOpenMemHandle");
}

TEST(older_runtimes_lack_what_is_optional) {
  const std::string old = described("libamdhip64.so.6");
  CHECK_HAS(old, "\"version\": 60343483");
  CHECK_HAS(old, "\"dmabuf\": false");
  CHECK_HAS(old, "\"stream_waits\": false");
  CHECK_HAS(described("libamdhip64.so.6 libhsa-runtime64.so.1"), "\"dmabuf\": true");
}

TEST(hidden_devices_are_not_counted) {
  const std::string one = described("libamdhip64.so.7", "HIP_VISIBLE_DEVICES=1");
  CHECK_HAS(one, "\"visible\": {\"HIP_VISIBLE_DEVICES\": \"1\"}");
  CHECK_HAS(one, "\"device\": 0, \"pci\": \"0000:c1:00.0\"");
  CHECK(!has(one, "0000:c0:00.0"));
  CHECK_HAS(described("libamdhip64.so.7", "ROCR_VISIBLE_DEVICES="), "it finds no device");
}

TEST(the_other_spelling_and_an_older_one_pass_the_same_tests) {
  if (std::getenv("TEST_DEVICE_RUNTIME") != nullptr) return;
  char self[4096];
  const ssize_t length = ::readlink("/proc/self/exe", self, sizeof self);
  const std::string program(self, static_cast<size_t>(length));
  CHECK_EQ(::system(("TEST_DEVICE_RUNTIME=libcudart.so.13 " + program + " memory_").c_str()), 0);
  CHECK_EQ(::system(("TEST_DEVICE_RUNTIME=libamdhip64.so.6 " + program + " memory_of_expandable").c_str()), 0);
}

// ---- From here on in this process ----

TEST(memory_is_told_apart) {
  static char pinned[8192];
  CHECK_EQ(gpu().calls.HostRegister(pinned, sizeof pinned, 0), 0);
  int here = 0;
  auto* const device = static_cast<char*>(fake().allocate(10000));
  CHECK(gpu().at(&here).kind == GpuPointer::Kind::host);
  CHECK(gpu().at(pinned + 8191).kind == GpuPointer::Kind::pinned);
  CHECK(gpu().at(fake().allocate(64, "fake_gpu_malloc_managed")).kind == GpuPointer::Kind::managed);
  const GpuPointer inside = gpu().at(device + 9999);
  CHECK(inside.kind == GpuPointer::Kind::device);
  CHECK_EQ(inside.base, number(device));
  CHECK_EQ(inside.size, 12288u);
  CHECK_EQ(inside.device, 0);
  fake().set_device(1);
  CHECK_EQ(gpu().at(fake().allocate(1)).device, 1);
  fake().set_device(0);
  CHECK_EQ(gpu().calls.HostUnregister(pinned), 0);
}

TEST(memory_that_is_no_devices_is_refused_by_name) {
  int here = 0;
  CHECK_HAS(why_not([&] { gpu().demand_device("data", &here, 4); }), "argument data = 0x");
  CHECK_HAS(why_not([&] { gpu().demand_device("data", &here, 4); }), "as host memory");
  auto* const device = static_cast<char*>(fake().allocate(4096));
  CHECK_EQ(gpu().demand_device("data", device + 1, 4095), 0);
  CHECK_HAS(why_not([&] { gpu().demand_device("data", device, 4097); }), "4097 bytes");
  fake().free(device);
  CHECK_HAS(why_not([&] { gpu().demand_device("data", device, 1); }), "it was freed");
  fake().fail("PointerGetAttributes", 700);
  CHECK_HAS(why_not([&] { gpu().demand_device("data", device, 1); }), "error 700: an illegal memory access");
}

TEST(memory_of_expandable_segments_has_pieces) {
  constexpr size_t kPiece = 2u << 20;
  auto* const device = static_cast<char*>(fake().allocate(5 * kPiece, "fake_gpu_malloc_expandable"));
  CHECK_EQ(gpu().demand_device("data", device + 1, 5 * kPiece - 1), 0);
  const auto pieces = gpu().pieces(device + kPiece - 1, kPiece + 2);
  CHECK_EQ(pieces.size(), 3u);
  CHECK_EQ(pieces[2].base, number(device) + 2 * kPiece);
  CHECK_EQ(gpu().pieces(device, 1).size(), 1u);
}

TEST(memory_of_expandable_segments_is_opened_by_descriptors) {
  constexpr size_t kPiece = 2u << 20;
  auto* const device = static_cast<char*>(fake().allocate(2 * kPiece, "fake_gpu_malloc_expandable"));
  fake().copy(device + kPiece - 2, "abcd", 4);
  const auto exported = [&] {
    std::vector<ExportedPiece> pieces;
    for (const size_t at : {size_t{9}, kPiece}) pieces.push_back(export_piece(gpu(), device + at));
    return pieces;
  };
  const auto pieces = exported();
  CHECK(pieces[0].by_fd && pieces[1].by_fd);
  {
    const auto opened = open_pieces(gpu(), 0, pieces);
    char back[4];
    fake().copy(back, opened->address() + kPiece - 2, 4);
    CHECK_EQ(std::string(back, 4), "abcd");
    CHECK_EQ(fake().held("opened"), 2);
  }
  CHECK_EQ(fake().held("opened"), 0);
  fake().fail("MemMap", 801);
  CHECK_HAS(why_not([&] { open_pieces(gpu(), 0, pieces); }), "MemMap of 2097152 bytes of device memory: error 801");
  fake().fail("MemExportToShareableHandle", 801);
  CHECK_HAS(why_not(exported), "IpcGetMemHandle of 2097152 bytes of device memory: error 1");
  CHECK_EQ(fake().held("opened") + fake().held("handles"), 0);
}

TEST(memory_exports_know_their_offset) {
  auto* const device = static_cast<char*>(fake().allocate(5 * 4096));
  struct Case {
    uint64_t offset, size;
  };
  for (const auto& [offset, size] : {Case{0, 1}, Case{0, 20480}, Case{4095, 2}, Case{4096, 4096}, Case{12345, 77}}) {
    const std::string text = "bytes at " + std::to_string(offset);
    fake().copy(device + offset, text.data(), std::min<uint64_t>(size, text.size()));
    const DmaBuf exported = gpu().export_dmabuf(device + offset, size);
    char back[64] = {};
    // The runtime's begin at a page, which the fake tells by the descriptor's position; HSA's at the allocation.
    const auto begin = ::lseek(exported.fd.get(), 0, SEEK_CUR);
    CHECK_EQ(begin + static_cast<off_t>(exported.offset), static_cast<off_t>(offset));
    CHECK(::pread(exported.fd.get(), back, std::min<uint64_t>(size, text.size()), static_cast<off_t>(offset)) > 0);
    CHECK_EQ(std::string(back), text.substr(0, size));
  }
}

TEST(memory_exports_fall_back_and_say_what_was_tried) {
  auto* const device = static_cast<char*>(fake().allocate(3 * 4096));
  fake().fail("MemGetHandleForAddressRange", 801);
  if (!gpu().is_hip) {
    CHECK_HAS(why_not([&] { gpu().export_dmabuf(device, 1); }),
              "cuMemGetHandleForAddressRange of 4096 bytes: error 801: operation not supported");
    return;
  }
  const DmaBuf by_hsa = gpu().export_dmabuf(device + 5000, 10);
  CHECK_EQ(by_hsa.offset, 5000u);
  fake().fail("MemGetHandleForAddressRange", 801);
  fake().fail("hsa_amd_portable_export_dmabuf", 4096);
  const std::string why = why_not([&] { gpu().export_dmabuf(device, 10); });
  CHECK_HAS(why, "hipMemGetHandleForAddressRange of 4096 bytes: error 801");
  CHECK_HAS(why, "hsa_amd_portable_export_dmabuf: status 4096");
}

TEST(memory_calls_leave_the_current_device) {
  fake().set_device(1);
  {
    const OnDevice scope(gpu(), 0);
    int now = -1;
    CHECK_EQ(gpu().calls.GetDevice(&now), 0);
    CHECK_EQ(now, 0);
  }
  int now = -1;
  CHECK_EQ(gpu().calls.GetDevice(&now), 0);
  CHECK_EQ(now, 1);
  fake().set_device(0);
  CHECK_HAS(why_not([] { const OnDevice scope(gpu(), 9); }), "SetDevice of device 9: error 101");
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "--describe" || what == "--load") {
    for (int i = 2; i < argc; ++i) load_fake_gpu(argv[i]);
    std::printf("%s\n", describe_gpus(what == "--load").c_str());
    return 0;
  }
  return mr::test::run(argc, argv);
}
