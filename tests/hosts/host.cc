#include "host.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/ipv6.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>

namespace hosts {
namespace {

constexpr int kNamespaces = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID;
constexpr char kCard[] = "eth0";

int must(int result, const std::string& what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

std::string address(int number) { return "10.77.0." + std::to_string(number); }
std::string address6(int number) { return "fd77::" + std::to_string(number); }
std::string name(int number) { return "host" + std::to_string(number); }

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  if (!(file << text << std::flush)) throw std::system_error(errno, std::generic_category(), path);
}

// `path` shows `text` on this host, and nothing of that is found elsewhere.
void put_over(const std::string& path, const std::string& text) {
  const std::string file = "/dev/shm/over";
  write_file(file, text);
  must(::mount(file.c_str(), path.c_str(), nullptr, MS_BIND, nullptr), "mount " + path);
  must(::unlink(file.c_str()), file);
}

void mount_own(int count) {
  must(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr), "private mounts");
  must(::mount("proc", "/proc", "proc", 0, nullptr), "mount /proc");
  must(::mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777"), "mount /dev/shm");
  // A boot of its own makes it another host.
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/uuid") >> boot_id;
  put_over("/proc/sys/kernel/random/boot_id", boot_id + "\n");
  std::string names = "127.0.0.1 localhost\n::1 localhost\n";
  for (int each = 1; each <= count; ++each) names += address(each) + " " + name(each) + "\n";
  put_over("/etc/hosts", names);
}

ifreq request(const char* card) {
  ifreq out{};
  std::snprintf(out.ifr_name, sizeof out.ifr_name, "%s", card);
  return out;
}

void set_address(int socket, unsigned long what, const std::string& text) {
  ifreq asked = request(kCard);
  auto* const at = reinterpret_cast<sockaddr_in*>(&asked.ifr_addr);
  at->sin_family = AF_INET;
  ::inet_pton(AF_INET, text.c_str(), &at->sin_addr);
  must(::ioctl(socket, what, &asked), "address " + text);
}

void set_up(int socket, const char* card) {
  ifreq asked = request(card);
  must(::ioctl(socket, SIOCGIFFLAGS, &asked), card);
  asked.ifr_flags = static_cast<short>(asked.ifr_flags | IFF_UP | IFF_RUNNING);
  must(::ioctl(socket, SIOCSIFFLAGS, &asked), std::string(card) + " up");
}

void set_address6(int number) {
  const int socket = ::socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return;  // a kernel without IPv6
  ifreq card = request(kCard);
  must(::ioctl(socket, SIOCGIFINDEX, &card), kCard);
  in6_ifreq asked{};
  asked.ifr6_ifindex = card.ifr_ifindex;
  asked.ifr6_prefixlen = 64;
  ::inet_pton(AF_INET6, address6(number).c_str(), &asked.ifr6_addr);
  // Usable at once: nobody else has the address.
  write_file("/proc/sys/net/ipv6/conf/eth0/accept_dad", "0");
  must(::ioctl(socket, SIOCSIFADDR, &asked), "address " + address6(number));
  ::close(socket);
}

int plug_card(int number) {
  const int card = must(::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "/dev/net/tun");
  ifreq asked = request(kCard);
  asked.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  must(::ioctl(card, TUNSETIFF, &asked), "a network card");
  const int socket = must(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket");
  asked = request(kCard);
  asked.ifr_hwaddr.sa_family = ARPHRD_ETHER;
  asked.ifr_hwaddr.sa_data[0] = 2;
  asked.ifr_hwaddr.sa_data[5] = static_cast<char>(number);
  must(::ioctl(socket, SIOCSIFHWADDR, &asked), "the card's own address");
  asked = request(kCard);
  asked.ifr_qlen = 10000;
  must(::ioctl(socket, SIOCSIFTXQLEN, &asked), "the card's queue");
  set_address(socket, SIOCSIFADDR, address(number));
  set_address(socket, SIOCSIFNETMASK, "255.255.255.0");
  set_up(socket, "lo");
  set_up(socket, kCard);
  set_address6(number);
  ::close(socket);
  return card;
}

void send_card(int to, int card) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof card)]{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof card);
  std::memcpy(CMSG_DATA(head), &card, sizeof card);
  must(static_cast<int>(::sendmsg(to, &message, 0)), "sendmsg");
}

// The card, or what kept the host from having one.
int take_card(int from) {
  char text[256];
  iovec data{text, sizeof text};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))]{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  const auto got = ::recvmsg(from, &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) throw std::runtime_error("a host ended while it booted");
  const cmsghdr* const head = CMSG_FIRSTHDR(&message);
  if (head == nullptr) throw std::runtime_error(std::string(text, static_cast<size_t>(got)));
  int card = -1;
  std::memcpy(&card, CMSG_DATA(head), sizeof card);
  return card;
}

[[noreturn]] void live(int number, int count, int parent) {
  try {
    // Only this may come from outside; 2 stays for messages.
    ::dup2(parent, 3);
    ::close_range(4, ~0u, 0);
    ::close(0);
    ::close(1);
    must(::prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl");
    must(::setsid(), "setsid");
    must(::sethostname(name(number).c_str(), name(number).size()), "sethostname");
    mount_own(count);
    const int card = plug_card(number);
    send_card(3, card);
    ::close(card);
    ::close(3);
  } catch (const std::exception& error) {
    (void)!::write(3, error.what(), std::strlen(error.what()));
    ::_exit(1);
  }
  for (;;) ::pause();  // what is left to it the kernel buries: it ignores SIGCHLD
}

}  // namespace

Host boot(int number, int count) {
  int ends[2];
  must(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), "socketpair");
  Host host;
  host.first = static_cast<pid_t>(::syscall(SYS_clone, kNamespaces | SIGCHLD, nullptr, nullptr, nullptr, nullptr));
  if (host.first == 0) live(number, count, ends[1]);
  ::close(ends[1]);
  must(host.first, "new namespaces");
  host.card = take_card(ends[0]);
  ::close(ends[0]);
  send_in_pieces(host, true);
  return host;
}

void power_off(Host* host) {
  if (host->first == 0) return;
  ::kill(host->first, SIGKILL);  // its end waits for whoever started processes there
  ::close(host->card);
  *host = Host{};
}

void send_in_pieces(const Host& host, bool large) {
  const unsigned long what = large ? TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 : 0;
  must(::ioctl(host.card, TUNSETOFFLOAD, what), "TUNSETOFFLOAD");
}

void become(char** argv) {
  char* const folder = ::getcwd(nullptr, 0);
  const int first = must(static_cast<int>(::syscall(SYS_pidfd_open, 1, 0)), "the host's first process");
  must(::setns(first, kNamespaces & ~CLONE_NEWPID), "setns");
  ::close(first);
  if (folder != nullptr) must(::chdir(folder), folder);
  ::execvp(argv[0], argv);
  throw std::system_error(errno, std::generic_category(), argv[0]);
}

}  // namespace hosts
