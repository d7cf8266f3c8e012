// One host: processes in namespaces of their own (network, mounts, names, IPC, process ids), with one network card. It
// lives as long as its first process, and has no name outside: nothing of it can be left behind.
#pragma once

#include <sys/types.h>

namespace hosts {

// The address in host `number`, from 1; the last byte of the card's own address is the number too.
constexpr int kMaxHosts = 200;

struct Host {
  pid_t first = 0;  // as seen from outside; inside it is 1
  int card = -1;    // what the host sends can be read here, and what is written it receives: frames with virtio headers
};

// `count`: how many hosts /etc/hosts names. Throws std::system_error that says what could not be done.
Host boot(int number, int count);

// The host ends at once, with everything that runs there.
void power_off(Host* host);

// Packets leave a host in pieces of up to 64 KiB that travel as one, or as they would on a cable.
void send_in_pieces(const Host& host, bool large);

// For a process that was started under a host's process ids: becomes `argv` there. Returns only by throwing.
void become(char** argv);

}  // namespace hosts
