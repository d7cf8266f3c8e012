#include "thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

#include "error.h"

namespace mr {

std::thread start_without_signals(const std::string& name, std::function<void()> body) {
  sigset_t blocked, before;
  ::sigfillset(&blocked);
  for (int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) ::sigdelset(&blocked, crash);
  ::pthread_sigmask(SIG_SETMASK, &blocked, &before);
  std::thread thread;
  int failure = 0;
  try {
    thread = std::thread(std::move(body));
    ::pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  } catch (const std::system_error& error) {
    failure = error.code().value();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure != 0)
    throw Error(MR_RESOURCE_EXHAUSTED, "can't start the thread " + name + " (raise `ulimit -u`)", failure);
  return thread;
}

}  // namespace mr
