#!/bin/busybox sh
# First program of the machine (in its initial RAM file system): loads the modules, lays memory over the host's files,
# which are mounted read-only, and hands over to guest_agent.sh. When that ends, the machine does.
b=/bin/busybox
value() { $b sed -n "s/.*\<vm_$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
$b ln -s /proc/self/fd /dev/fd
while read -r module; do
  $b insmod "/modules/$module" || echo "insmod $module failed"
done < /modules/order

$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro host /host
$b mount -t tmpfs memory /memory
$b mkdir /memory/upper /memory/work
$b mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work overlay /root

$b mkdir -p /dev/shm /dev/pts /root/results
$b mount -t tmpfs shm /dev/shm
$b mount -t devpts pts /dev/pts
for folder in proc sys dev; do $b mount -o bind /$folder /root/$folder; done
$b mount -t tmpfs run /root/run
# Uncached, so that the host sees at once what is written, and the machine what the host writes.
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=none results /root/results
$b ip link set lo up

$b chroot /root /bin/bash "$(value agent)" "$(value number)" "$(value rails)" "$(value pyverbs)"
$b poweroff -f
