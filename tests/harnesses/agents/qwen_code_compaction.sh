# /// script
# [tool.harness]
# of = "qwen_code"
# scene = "compaction"
# beside = "You are the component that summarizes a conversation"
# ///
export OPENAI_MODEL=$MODEL
mkdir -p .qwen
echo '{"model": {"generationConfig": {"samplingParams": {"max_tokens": 4000}}}}' >.qwen/settings.json
qwen -p "$1" --auth-type openai --yolo >first.txt || exit
qwen -p "/compress" --continue --auth-type openai --yolo >second.txt || exit
qwen -p "$2" --continue --auth-type openai --yolo
