nvidia-smi --query-gpu=name --format=csv,noheader
mkdir -p $OUT
date +%T
for k in "test_kernels.py -k Products" "test_kernels.py -k not(Products)" "test_attention_cuda.py -k TestDecode" "test_attention_cuda.py -k not(TestDecode)" "test_engine_cuda.py"; do
  f=$(echo "$k" | tr -c 'a-zA-Z\n' _)
  set -- $k
  sel="${k#*-k }"; [ "$sel" = "$k" ] && sel=""
  sel=$(echo "$sel" | sed 's/(/ /; s/)//')
  timeout 150 python3 -m pytest -q --maxfail=4 --tb=short tests/gpu/$1 -k "$sel" -p no:cacheprovider > $OUT/$f.log 2>&1 &
done
wait
date +%T
for f in $OUT/*.log; do echo "== $f"; grep -E "^E  |passed|failed|Error" $f | head -12; done
timeout 200 python3 benchmarks/gpu_kernels.py attention elementwise linear 2>&1 | tee $OUT/tune.txt | tail -150
date +%T
timeout 120 python3 benchmarks/gpu_decode.py --shapes qwen3-0.6b --repeats 1 --modes async --profile --profile-batches 1 256 2>&1 | tail -60
date +%T
