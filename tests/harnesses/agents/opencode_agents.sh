# /// script
# [tool.harness]
# of = "opencode"
# scene = "agents"
# beside = "You look under tables."
# then = {name = "task", arguments = {description = "Looks", prompt = "Look under the table.", subagent_type = "looker"}}
# ///
cat >opencode.json <<END
{"provider": {"router": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "none"},
 "models": {"$MODEL": {"limit": {"context": 30000, "output": 2000}}}}}, "autoupdate": false, "share": "disabled",
 "agent": {"looker": {"mode": "subagent", "description": "Looks under tables", "prompt": "You look under tables."}}}
END
opencode run "$1" --model "router/$MODEL"
