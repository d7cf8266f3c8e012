#!/bin/bash
# Runs in the machine: sets up the rails, then carries out what the host asks on the control port, one line each:
#   start ID          runs /results/ID.sh, output to /results/ID.out; answers "started ID PID", later "ended ID STATUS"
#   signal PID NAME   signals what was started, with all its children
# Ends, and with it the machine, when the host closes the port.
#
#   guest_agent.sh NUMBER RAILS PYVERBS    RAILS: dummy (one machine) or wire (two, NUMBER 1 and 2)
number=$1 rails=$2
checkout=$(realpath "$(dirname "$0")/../..")

export PATH=$checkout/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$checkout:$3
# Plugins of pytest cost many seconds here.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_ADDOPTS="-p pytest_timeout -p no:cacheprovider --confcutdir=tests/rdma_vm"
export RDMA_VM_NUMBER=$number RDMA_VM_PROGRAMS=$checkout/build/core/rdma_vm
hostname "rdma$number"
cd "$checkout" || exit

for port in /sys/class/virtio-ports/*; do
  [ "$(cat "$port/name")" = control ] && exec 3<> "/dev/${port##*/}"
done

# Interfaces rail0 and rail1 (10.9.0.NUMBER and 10.9.1.NUMBER) with devices rxe0 and rxe1. An MTU of 4200 gives RoCE 4096.
wires=(/sys/bus/virtio/drivers/virtio_net/virtio*/net/*)
for rail in 0 1; do
  case $rails in
    dummy) ip link add "rail$rail" type dummy ;;
    wire) ip link set "${wires[rail]##*/}" name "rail$rail" ;;
  esac
  ip link set "rail$rail" mtu 4200 up
  ip addr add "10.9.$rail.$number/24" dev "rail$rail"
  rdma link add "rxe$rail" type rxe netdev "rail$rail"
done
chmod 666 /dev/infiniband/*
# The kernel opens the ports and enters the addresses a moment later.
for rail in 0 1; do
  port=/sys/class/infiniband/rxe$rail/ports/1
  gid=$(printf '0000:0000:0000:0000:0000:ffff:0a09:%02x%02x' "$rail" "$number")
  until grep -q ACTIVE "$port/state" && grep -qx "$gid" "$port"/gids/* 2> /dev/null; do sleep 0.05; done
done

start() { # start ID : in a session of its own, so that it can be signalled with its children
  setsid bash "/results/$1.sh" < /dev/null > "/results/$1.out" 2>&1 3>&- &
  local pid=$!
  echo "started $1 $pid" >&3
  wait "$pid"
  echo "ended $1 $?" >&3
}

echo "ready" >&3
while read -r order first second <&3; do
  case $order in
    start) start "$first" & ;;
    signal) kill -s "$second" -- "-$first" ;;
  esac
done
