# From here on, the same in every job. Hosts are known when the job starts: the first ones train, the others serve.
export PATH="$programs:$PATH"
if [ -n "$setup" ]; then
    # shellcheck source=/dev/null
    source "$setup" || exit 1
fi
set -u -o pipefail
cd -- "$folder" || exit 1
notes="$notes/$SLURM_JOB_ID"
mkdir -p -- "$notes" "$logs"
pids=()

join() {
    local IFS=,
    echo "$*"
}

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainer_hosts=("${hosts[@]:0:trainer_nodes}")
server_hosts=("${hosts[@]:trainer_nodes}")
cpus=${SLURM_CPUS_ON_NODE:-1}
export MASTER_ADDR=${trainer_hosts[0]}
export MASTER_PORT=$((rendezvous_port + SLURM_JOB_ID % 1000))  # Jobs on the same node must not meet each other.

# A server that ends is started again at its address; the trainer gives it the current weights.
# shellcheck disable=SC2016
run_server='
unset MTRL_WORKER_TOKEN MTRL_SANDBOX_TOKEN
port=$(($1 + SLURM_LOCALID)) first_gpu=$((SLURM_LOCALID * $2))
shift 2
for attempt in 1 2 3 4 5; do
    "$@" --port "$port" --base-gpu-id "$first_gpu"
    echo "the server ended with code $? (attempt $attempt of 5)"
    sleep 5
done
exit 1'

# shellcheck disable=SC2016
run_rank='
export MTRL_OUTPUT_KEPT=1 RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$0
[ "$RANK" = 0 ] || unset MTRL_WORKER_TOKEN
exec "$@"'

# Ends the job if it failed too often, else puts it back into the queue, from which it resumes.
fail() {
    local failures
    failures=$(($(cat -- "$notes/failures" 2>/dev/null || echo 0) + 1))
    echo "$failures" >"$notes/failures"
    if [ "$failures" -gt "$retries" ]; then
        echo "mtrl: $1; failed $failures times, so the job ends: see $logs" >&2
        exit 1
    fi
    echo "mtrl: $1; the job goes back into the queue (retry $failures of $retries)" >&2
    requeue
}

requeue() {
    scontrol requeue "$SLURM_JOB_ID" || exit 1
    sleep 300  # Slurm ends this script.
    exit 1
}

# Slurm signals this script before the time limit: the trainer, if it runs, stops as after Ctrl-C, and saves finished rollouts.
limit_reached=
stop_signal=TERM
on_limit() {
    limit_reached=1
    echo "mtrl: the time limit is near: the trainer stops, and the job goes back into the queue" >&2
    if [ ${#pids[@]} -gt 0 ]; then
        kill -"$stop_signal" "${pids[-1]}" 2>/dev/null
        (sleep "$((stop_s / 2))" && kill -TERM "${pids[-1]}" 2>/dev/null) &
    fi
}
trap on_limit USR1

# Waits for the newest process; fails if an older one ends first. Signals to this script are handled meanwhile.
wait_for_newest() {
    local pid
    while kill -0 "${pids[-1]}" 2>/dev/null; do
        for pid in "${pids[@]}"; do
            kill -0 "$pid" 2>/dev/null || [ "$pid" = "${pids[-1]}" ] || return 1
        done
        sleep 2 &
        wait $!
    done
    wait "${pids[-1]}"
}

engine=()
if [ ${#server_hosts[@]} -gt 0 ]; then
    urls=()
    for host in "${server_hosts[@]}"; do
        for ((index = 0; index < servers_each; index++)); do
            urls+=("http://$host:$((server_port + index))")
        done
    done
    engine=(--engine "$(join "${urls[@]}")")
    srun --nodes="${#server_hosts[@]}" --ntasks="${#urls[@]}" --ntasks-per-node="$servers_each" \
        --nodelist="$(join "${server_hosts[@]}")" --cpus-per-task="$((cpus / servers_each > 0 ? cpus / servers_each : 1))" \
        "${gpu_options[@]}" --cpu-bind=none --unbuffered --open-mode=append --output="${logs//%/%%}/sglang-%t.log" \
        bash -c "$run_server" server "$server_port" "$server_gpus" \
        "${MTRL_SGLANG_PYTHON:-.sglang/bin/python}" -m sglang.launch_server "${server[@]}" &
    pids+=($!)
    mtrl-train wait-for-servers --within "$servers_start_s" "${urls[@]}" &
    pids+=($!)
    wait_for_newest
    code=$?
    [ -z "$limit_reached" ] || requeue
    [ "$code" -eq 0 ] || fail "the servers did not start"
    unset 'pids[-1]'
fi

# Servers of sandboxes run beside what else the last nodes do, without GPUs (the job's variable would ask for some). One
# that ends is started again, and meanwhile the others get its calls.
if [ "$sandboxes" -gt 0 ]; then
    sandboxes_port=$((sandboxes_port + SLURM_JOB_ID % 1000))
    export MTRL_SANDBOX_TOKEN="${MTRL_SANDBOX_TOKEN:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}"
    rm -f -- "$notes/sandbox-token"
    (umask 077 && echo "$MTRL_SANDBOX_TOKEN" >"$notes/sandbox-token")
    sandbox_hosts=("${hosts[@]: -sandboxes}")
    urls=("${sandbox_hosts[@]/#/http://}")
    MTRL_SANDBOXES=$(join "${urls[@]/%/:$sandboxes_port}")
    export MTRL_SANDBOXES
    env -u SLURM_GPUS_PER_NODE srun --overlap --nodes="$sandboxes" --ntasks="$sandboxes" --ntasks-per-node=1 \
        --nodelist="$(join "${sandbox_hosts[@]}")" --cpus-per-task="$cpus" --gres=none --cpu-bind=none --unbuffered --open-mode=append \
        --output="${logs//%/%%}/sandboxes-%t.log" bash -c 'unset MTRL_SANDBOX_TOKEN; while true; do "$@"; sleep 5; done' \
        sandboxes mtrl-gateway sandboxes --host 0.0.0.0 --port "$sandboxes_port" --token-file "$notes/sandbox-token" &
    pids+=($!)
    mtrl-train wait-for-sandboxes --within "$servers_start_s" &
    pids+=($!)
    wait_for_newest
    code=$?
    [ -z "$limit_reached" ] || requeue
    [ "$code" -eq 0 ] || fail "no server of sandboxes started"
    unset 'pids[-1]'
fi
resume=()
stop_signal=INT
if [ -e "$run/run.json" ]; then
    resume=(--resume)
fi
rm -f -- "$notes/rank-0.code"  # Of an earlier start of this job.
MTRL_EXIT_CODE_FILE="$notes/rank-0.code" srun --nodes="$trainer_nodes" --ntasks="$((trainer_nodes * ranks_each))" --ntasks-per-node="$ranks_each" \
    --nodelist="$(join "${trainer_hosts[@]}")" --cpus-per-task="$((cpus / ranks_each > 0 ? cpus / ranks_each : 1))" \
    "${gpu_options[@]}" --cpu-bind=none --unbuffered --open-mode=append --output="${logs//%/%%}/rank-%t.log" \
    --disable-status --kill-on-bad-exit=1 \
    bash -c "$run_rank" "$ranks_each" "${train[@]}" "${engine[@]}" "${resume[@]}" &
pids+=($!)
wait_for_newest
code=$?
if [ -n "$limit_reached" ]; then
    rm -f -- "$notes/failures"
    requeue
fi
# srun returns the highest code, such as that of a rank that it killed because rank 0 had ended.
rank_0=$(cat -- "$notes/rank-0.code" 2>/dev/null)
if [ "$code" -ne 0 ] && [ "${rank_0:-$code}" -eq 2 ]; then
    echo "mtrl: another start would end alike, so the job ends: see $logs/rank-0.log" >&2
    exit 2
fi
if [ "$code" -ne 0 ]; then
    fail "the trainer or the servers ended early (code $code)"
fi
echo "mtrl: the run is finished: $run"
exit 0  # Slurm ends the servers with the job.
