# /// script
# [tool.harness]
# npm = ["@openai/codex@0.171.0"]
# dialect = "responses"
# tool = "exec_command"
# first = {cmd = "echo there 2"}
# second = {cmd = "echo here"}
# ///
mkdir -p "$HOME/.codex"
cat >"$HOME/.codex/config.toml" <<END
model = "$MODEL"
model_provider = "router"
[model_providers.router]
name = "router"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
flags="--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
codex exec $flags "$1" >first.txt || exit
[ $# -lt 2 ] || codex exec resume --last $flags "$2" >first.txt || exit
cat first.txt
