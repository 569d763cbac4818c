# /// script
# [tool.harness]
# of = "claude_code"
# scene = "agents"
# beside = "You look under tables."
# then = {name = "Agent", arguments = {description = "Looks", prompt = "Look under the table.", subagent_type = "looker", run_in_background = false}}
# ///
export IS_SANDBOX=1 DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS=4000
agents='{"looker": {"description": "Looks under tables", "prompt": "You look under tables."}}'
claude -p "$1" --agents "$agents" --model "$MODEL" --dangerously-skip-permissions --max-turns 20
