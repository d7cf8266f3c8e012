#include "device_ipc.h"

#include <map>
#include <mutex>

namespace mr {
namespace {

constexpr unsigned kLazyPeerAccess = 1;
constexpr int kPosixFd = 1;
constexpr int kOnDevice = 1, kReadWrite = 3;
constexpr int kRocm71 = 70100000;  // from here on HIP takes a descriptor as CUDA does, before it took its address

struct AccessRights {
  int location_kind, location, flags;
};

std::string bytes_text(uint64_t size) { return std::to_string(size) + " bytes of device memory"; }

class OpenedHandle final : public OpenedMemory {
 public:
  OpenedHandle(const Gpu& gpu, int device, const ExportedPiece& piece) : gpu_(gpu), device_(device) {
    const OnDevice scope(gpu, device);
    void* at = nullptr;
    gpu.check(gpu.calls.IpcOpenMemHandle(&at, piece.handle, kLazyPeerAccess), MR_REGISTRATION, "IpcOpenMemHandle",
              bytes_text(piece.size));
    address_ = static_cast<uint8_t*>(at);
  }
  ~OpenedHandle() override {
    try {
      const OnDevice scope(gpu_, device_);
      if (gpu_.calls.IpcCloseMemHandle(address_) != 0) (void)gpu_.calls.GetLastError();  // its device has failed
    } catch (const Error&) {
      (void)gpu_.calls.GetLastError();  // the same
    }
  }

 private:
  const Gpu& gpu_;
  const int device_;
};

class OpenedDescriptors final : public OpenedMemory {
 public:
  OpenedDescriptors(const Gpu& gpu, int device, const std::vector<ExportedPiece>& pieces) : gpu_(gpu) {
    const OnDevice scope(gpu, device);
    for (const auto& piece : pieces) size_ += piece.size;
    void* at = nullptr;
    gpu.check(gpu.calls.MemAddressReserve(&at, size_, 0, nullptr, 0), MR_REGISTRATION, name("AddressReserve"),
              bytes_text(size_));
    address_ = static_cast<uint8_t*>(at);
    try {
      for (const auto& piece : pieces) map(piece);
      const AccessRights rights{kOnDevice, device, kReadWrite};
      gpu.check(gpu.calls.MemSetAccess(address_, size_, &rights, 1), MR_REGISTRATION, name("SetAccess"),
                bytes_text(size_));
    } catch (const Error&) {
      close();
      throw;
    }
  }
  ~OpenedDescriptors() override { close(); }

 private:
  const char* name(const char* call) {
    name_ = std::string(gpu_.is_hip ? "hipMem" : "cuMem") + call;
    return name_.c_str();
  }

  void map(const ExportedPiece& piece) {
    int fd = piece.fd.get();
    void* const shared = gpu_.is_hip && gpu_.version < kRocm71 ? static_cast<void*>(&fd)
                                                               : reinterpret_cast<void*>(static_cast<intptr_t>(fd));
    void* handle = nullptr;
    gpu_.check(gpu_.calls.MemImportFromShareableHandle(&handle, shared, kPosixFd), MR_REGISTRATION,
               name("ImportFromShareableHandle"), bytes_text(piece.size));
    const int code = gpu_.calls.MemMap(address_ + mapped_, piece.size, 0, handle, 0);
    (void)gpu_.calls.MemRelease(handle);  // the mapping holds the memory
    gpu_.check(code, MR_REGISTRATION, name("Map"), bytes_text(piece.size));
    sizes_.push_back(piece.size);
    mapped_ += piece.size;
  }

  void close() {
    for (uint8_t* at = address_; const uint64_t size : sizes_) {
      (void)gpu_.calls.MemUnmap(at, size);
      at += size;
    }
    (void)gpu_.calls.MemAddressFree(address_, size_);
  }

  const Gpu& gpu_;
  std::string name_;
  uint64_t size_ = 0, mapped_ = 0;
  std::vector<uint64_t> sizes_;
};

}  // namespace

void ExportedPiece::encode(Writer& out) const {
  out.put(base).put(size).put(static_cast<uint8_t>(by_fd));
  out.raw({reinterpret_cast<const uint8_t*>(handle.bytes), sizeof handle.bytes});
}

ExportedPiece ExportedPiece::decode(Reader& in) {
  ExportedPiece out;
  out.base = in.get<uint64_t>();
  out.size = in.get<uint64_t>();
  out.by_fd = in.get<uint8_t>() != 0;
  std::memcpy(out.handle.bytes, in.raw(sizeof out.handle.bytes).data(), sizeof out.handle.bytes);
  return out;
}

ExportedPiece export_piece(const Gpu& gpu, const void* address) {
  const GpuPointer found = gpu.at(address);
  if (found.kind != GpuPointer::Kind::device || found.size == 0)
    throw Error(MR_REGISTRATION, "it is not memory of a device any more");
  const OnDevice scope(gpu, found.device);
  ExportedPiece out;
  out.base = found.base;
  out.size = found.size;
  const int refused = gpu.calls.IpcGetMemHandle(&out.handle, reinterpret_cast<void*>(found.base));
  if (refused == 0) return out;
  const std::string why = gpu.failure(MR_REGISTRATION, "IpcGetMemHandle", bytes_text(found.size), refused).text;
  // Of an expandable segment.
  void* handle = nullptr;
  if (gpu.calls.MemRetainAllocationHandle == nullptr || gpu.calls.MemExportToShareableHandle == nullptr ||
      gpu.calls.MemRetainAllocationHandle(&handle, reinterpret_cast<void*>(found.base)) != 0) {
    (void)gpu.calls.GetLastError();
    throw Error(MR_REGISTRATION, why);
  }
  int fd = -1;
  const int code = gpu.calls.MemExportToShareableHandle(&fd, handle, kPosixFd, 0);
  (void)gpu.calls.MemRelease(handle);
  if (code != 0)
    throw Error(
        MR_REGISTRATION,
        why + "; " +
            gpu.failure(MR_REGISTRATION, gpu.is_hip ? "hipMemExportToShareableHandle" : "cuMemExportToShareableHandle",
                        bytes_text(found.size), code)
                .text);
  out.by_fd = true;
  out.fd = Fd(fd);
  return out;
}

std::shared_ptr<OpenedMemory> open_pieces(const Gpu& gpu, int device, const std::vector<ExportedPiece>& pieces) {
  if (pieces.front().by_fd) {
    if (gpu.calls.MemImportFromShareableHandle == nullptr)
      throw Error(MR_REGISTRATION, "this runtime opens no descriptors of device memory");
    return std::make_shared<OpenedDescriptors>(gpu, device, pieces);
  }
  // A runtime opens a handle once in a process; engines and peers share it.
  static std::mutex lock;
  static auto& opened = *new std::map<std::pair<int, std::string>, std::weak_ptr<OpenedMemory>>;
  const ExportedPiece& piece = pieces.front();
  std::lock_guard guard(lock);
  std::erase_if(opened, [](const auto& entry) { return entry.second.expired(); });
  auto& known = opened[{device, std::string(piece.handle.bytes, sizeof piece.handle.bytes)}];
  std::shared_ptr<OpenedMemory> out = known.lock();
  if (!out) known = out = std::make_shared<OpenedHandle>(gpu, device, piece);
  return out;
}

}  // namespace mr
