# /// script
# [tool.harness]
# npm = ["@google/gemini-cli@0.61.0"]
# dialect = "gemini"
# trajectories = 2
# because = "a resume strips the texts of all turns"
# tool = "run_shell_command"
# first = {command = "echo there 2"}
# second = {command = "echo here"}
# ///
mkdir -p "$HOME/.gemini"
# With an address in its environment it takes another kind of key for meant, which its own check refuses.
echo '{"security": {"auth": {"selectedType": "gemini-api-key"}}}' >"$HOME/.gemini/settings.json"
export GEMINI_CLI_TRUST_WORKSPACE=true
more=
for question in "$@"; do
  answer=$(gemini --prompt "$question" $more --model "$MODEL" --approval-mode yolo) || exit
  more="--resume latest"
done
echo "$answer"
