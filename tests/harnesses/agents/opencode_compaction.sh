# /// script
# [tool.harness]
# of = "opencode"
# scene = "compaction"
# asks_on = true
# beside = "context summarization agent"
# first = {command = "seq 2000", description = "Looks"}
# ///
cat >opencode.json <<END
{"provider": {"router": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "none"},
 "models": {"$MODEL": {"limit": {"context": 18000, "output": 2000}}}}}, "autoupdate": false, "share": "disabled"}
END
opencode run "$1" --model "router/$MODEL" >first.txt || exit
opencode run "$2" --continue --model "router/$MODEL"
