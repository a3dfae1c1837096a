#!/bin/sh
# g++ for a processor with AVX2 alone: DeepSpeed asks for what this one has, and has no switch.
for word; do
    shift
    case $word in
        -march=native) word=-march=haswell ;;
        -D__AVX512__) word=-D__AVX256__ ;;
    esac
    set -- "$@" "$word"
done
exec g++ "$@"
