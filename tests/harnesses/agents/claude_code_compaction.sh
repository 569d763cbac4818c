# /// script
# [tool.harness]
# of = "claude_code"
# scene = "compaction"
# beside = "Your task is to create a detailed summary"
# ///
export IS_SANDBOX=1 DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS=4000
flags="--model $MODEL --dangerously-skip-permissions --max-turns 20"
claude -p "$1" $flags >first.txt || exit
claude -p "/compact" --continue $flags >second.txt || exit
claude -p "$2" --continue $flags
