// Device memory of another process of this host. The owner exports each allocation that a range lies in, as a handle
// or, of expandable segments, as a descriptor; whoever opens them keeps them open as long as somebody uses them.
#pragma once

#include <memory>
#include <vector>

#include "../base/wire.h"
#include "device.h"

namespace mr {

// One allocation, in a form that travels. With `fd`, the descriptor goes beside it.
struct ExportedPiece {
  uint64_t base = 0, size = 0;  // in the owner's process
  bool by_fd = false;
  GpuIpcHandle handle{};
  Fd fd;

  void encode(Writer& out) const;
  static ExportedPiece decode(Reader& in);
};

// The allocation that `address` lies in. Throws MR_REGISTRATION, which says what was tried.
ExportedPiece export_piece(const Gpu& gpu, const void* address);

// Memory of others, mapped here; closed by the last owner.
class OpenedMemory {
 public:
  virtual ~OpenedMemory() = default;
  uint8_t* address() const { return address_; }  // of the first piece

 protected:
  uint8_t* address_ = nullptr;
};

// Pieces that follow each other. One that is open already in this process is shared. Throws MR_REGISTRATION.
std::shared_ptr<OpenedMemory> open_pieces(const Gpu& gpu, int device, const std::vector<ExportedPiece>& pieces);

}  // namespace mr
