mkdir -p $OUT
date +%T
for k in "test_kernels.py -k Products" "test_kernels.py -k not(Products)" "test_attention_cuda.py -k TestDecode" "test_attention_cuda.py -k not(TestDecode)" "test_engine_cuda.py"; do
  f=$(echo "$k" | tr -c 'a-zA-Z\n' _)
  set -- $k
  sel="${k#*-k }"; [ "$sel" = "$k" ] && sel=""
  sel=$(echo "$sel" | sed 's/(/ /; s/)//')
  timeout 100 python3 -m pytest -q --maxfail=4 --tb=short tests/gpu/$1 -k "$sel" -p no:cacheprovider > $OUT/$f.log 2>&1 &
done
wait
date +%T
for f in $OUT/*.log; do echo "== $f"; grep -E "^E  |passed|failed|Error" $f | head -12; done
timeout 150 python3 benchmarks/gpu_kernels.py attention elementwise linear > $OUT/tune.txt 2>&1
date +%T; tail -3 $OUT/tune.txt
timeout 90 python3 benchmarks/gpu_decode.py --shapes qwen3-0.6b --repeats 2 --profile --profile-batches 8 32 128 --lines 11 2>&1 | tail -70
date +%T
mv $OUT/gpu_decode.json $OUT/gpu_decode_06.json
timeout 100 python3 benchmarks/gpu_decode.py --shapes qwen3-8b --batches 1 8 32 256 --repeats 1 --modes async --profile --profile-batches 8 256 --lines 11 2>&1 | tail -50
date +%T
