# /// script
# [tool.harness]
# npm = ["@aaif/goose@0.20.1"]
# dialect = "chat"
# trajectories = 7
# because = "a note with the time stands elsewhere in each request: [moving-note](../findings/moving-note.sh)"
# tool = "shell"
# first = {command = "echo there 2"}
# second = {command = "echo here"}
# ///
export GOOSE_PROVIDER=openai GOOSE_MODEL=$MODEL GOOSE_MODE=auto GOOSE_DISABLE_KEYRING=1
export OPENAI_HOST=${OPENAI_BASE_URL%/v1} OPENAI_BASE_PATH=v1/chat/completions
more=
for question in "$@"; do
  answer=$(goose run --quiet --no-profile --with-builtin developer --name one $more --text "$question") || exit
  more=--resume
done
echo "$answer"
