# Starts the ranks of one pod: torchrun agrees with the other pods on who is which rank, and starts all of them again
# when one fails. Job, servers and run folder come by environment, from the manifest.
set -eu
if [ -n "$MTRL_ENGINE" ]; then
    # shellcheck disable=SC2046
    mtrl-train wait-for-servers --within "$MTRL_SERVERS_START_S" $(echo "$MTRL_ENGINE" | tr ',' ' ')
fi
is_host=false
if [ "$NODE_RANK" = 0 ]; then
    is_host=true
fi
# Without this, agents of torch 2.13 that stay never tell a pod that comes back where the ranks meet, and all end.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "$MTRL_NODES" --nproc-per-node "$MTRL_RANKS_EACH" --max-restarts "$MTRL_RETRIES" \
    --rdzv-backend c10d --rdzv-endpoint "$MTRL_RENDEZVOUS" --rdzv-id "$MTRL_JOB" \
    --rdzv-conf "is_host=$is_host,join_timeout=$MTRL_SERVERS_START_S" --local-addr "$POD_IP" \
    --no-python sh "$MTRL_FILES/rank.sh"
