#!/bin/sh
# Runs HAProxy with the configuration file $1, and lets it read its certificates again within a minute of their change.
"${HAPROXY-haproxy}" -W -db -f "$1" &
proxy=$!
# Calls that run go on to their ends.
trap 'kill -USR1 "$proxy"' TERM USR1
certificates() { cat "$EDGE_CERT" "$EDGE_CA" | cksum; }
(
    loaded=$(certificates)
    while sleep "${EDGE_LOOK_S-60}" && kill -0 "$proxy" 2>/dev/null; do
        now=$(certificates)
        [ "$now" = "$loaded" ] || kill -USR2 "$proxy"
        loaded=$now
    done
) &
# A signal ends the wait.
while kill -0 "$proxy" 2>/dev/null; do wait "$proxy"; done
