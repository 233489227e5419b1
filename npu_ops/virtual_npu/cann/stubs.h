/* The three forms of symbols that build.py lists in stubs.c: ones that say "done", ones that say "not supported"
 * (200006, ACL_ERROR_FEATURE_UNSUPPORTED), and ones that are recorded or computed. */
#define DONE(name) \
    __asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n  xor %eax, %eax\n  ret\n");
#define UNSUPPORTED(name) \
    __asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n  mov $200006, %eax\n  ret\n");
#define RECORDED(name)                                                     \
    __asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n"   \
            "  lea 1f(%rip), %rax\n  jmp aclnn_entry@PLT\n"                \
            ".section .rodata\n1: .string \"" #name "\"\n.text\n");
