#!/usr/bin/env bash
# A real Slurm on one machine, for tests: two nodes, which share everything but their hostnames.
#
#   tests/slurm/cluster.sh FOLDER      starts it and prints "ready"; it ends with its standard input (Ctrl-D)
#   export SLURM_CONF=FOLDER/slurm.conf; srun -N2 hostname
#
# The nodes claim more cores, memory and GPUs than there are; a GPU is no more than a number in CUDA_VISIBLE_DEVICES.
# As root on Debian or Ubuntu, with the packages slurmctld, slurmd, slurm-client, munge and libpmix-dev (Slurm's PMIx
# plugin looks for libpmix.so, which is in that one). Everything is written to FOLDER, whose path should be short.
set -euo pipefail

folder=$(realpath "$1")
port=$((20000 + $$ % 10000 * 3)) # another one for each cluster
export SLURM_CONF=$folder/slurm.conf

# No cgroups and no systemd: a job's processes are found by being each other's children.
cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthInfo=socket=$folder/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
TmpFS=$folder/tmp.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1000
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=64 RealMemory=64000 Gres=gpu:4
NodeName=n2 NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=64 RealMemory=64000 Gres=gpu:4
PartitionName=nvidia Nodes=n1,n2 Default=YES
END
echo "NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero,/dev/full,/dev/random" >"$folder/gres.conf"
mkdir -p "$folder"/{state,tmp.n1,tmp.n2}
(umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")

in_background() { # NAME COMMAND: what it says goes to NAME.log
	"${@:2}" </dev/null >"$folder/$1.log" 2>&1 &
}

nodes_up() { [ "$(sinfo --noheader --Node --states=idle,mixed,allocated 2>/dev/null | wc -l)" = 2 ]; }

until_true() { # COMMAND, tried for half a minute
	for ((i = 0; i < 150; i++)); do "$@" && return || sleep 0.2; done
	return 1
}

all_jobs_gone() {
	scancel --user=root --quiet
	[ -z "$(squeue --noheader)" ]
}

stop() {
	! nodes_up || until_true all_jobs_gone || true
	kill $(jobs -p) 2>/dev/null || true
	wait
}
trap stop EXIT

in_background munge munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge" \
	--seed-file="$folder/munge.seed" --pid-file="$folder/munge.pid"
until_true [ -S "$folder/munge" ]
in_background slurmctld slurmctld -D -c
for node in n1 n2; do
	in_background "slurmd.$node" unshare --uts sh -c 'hostname "$1" && exec slurmd -D -N "$1"' sh "$node"
done
until_true nodes_up
echo ready
cat >/dev/null
