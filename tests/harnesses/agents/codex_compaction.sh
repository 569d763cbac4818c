# /// script
# [tool.harness]
# of = "codex"
# scene = "compaction"
# beside = "CONTEXT CHECKPOINT COMPACTION"
# first = {cmd = "seq 9000"}
# ///
mkdir -p "$HOME/.codex"
cat >"$HOME/.codex/config.toml" <<END
model = "$MODEL"
model_provider = "router"
model_auto_compact_token_limit = 14000
[model_providers.router]
name = "router"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
flags="--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
codex exec $flags "$1" >first.txt || exit
codex exec resume --last $flags "$2" >second.txt || exit
cat second.txt
