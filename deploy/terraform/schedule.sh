#!/bin/sh
# schedule.sh put|delete: create, replace or delete the schedule NAME of the server TIMEBELL_URL; BODY is JSON.
set -eu

request() {
    curl --silent --show-error --fail-with-body --header "Authorization: Bearer $TIMEBELL_API_KEY" \
        --header "If-Match: *" --header "content-type: application/json" "$@"
}

schedules="$TIMEBELL_URL/api/v1/schedules"
case "$1" in
put) request --request PUT "$schedules/by-name/$NAME" --data "$BODY" ;;
delete)
    id=$(request --get "$schedules" --data-urlencode "name=$NAME" | grep -o '"id": *"[0-9a-f-]*"' | head -n 1 | cut -d '"' -f 4)
    [ -z "$id" ] || request --request DELETE "$schedules/$id"
    ;;
esac
