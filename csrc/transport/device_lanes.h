// The lanes for memory of GPUs.
//  ipc     memory of a device of this host: it is opened here, and a device copies. Within this process: the same,
//          without opening anything.
//  staged  through pinned host memory in pieces: the owner's processor, or ours, or both, copy between their device and
//          slots of such memory, and the pieces go over any lane for host memory.
// Cards that reach device memory by themselves are the verbs lane's.
#pragma once

#include "device_domain.h"
#include "lane.h"

namespace mr {

std::shared_ptr<Link> make_ipc(LinkHost& host, const std::shared_ptr<DeviceDomain>& domain);
std::shared_ptr<Link> make_own_device(LinkHost& host, const std::shared_ptr<DeviceDomain>& domain);
std::shared_ptr<Link> make_staged(LinkHost& host, const std::shared_ptr<DeviceDomain>& domain);

}  // namespace mr
